"""What is wrong with a machine or a run: findings with evidence, fix and expected gain. Reads records, times nothing.

The rules are values in one table (`outsize.doctor.rules`). Each has a pure function over what was recorded, a probe's
``machine.json`` and a run's directory; `outsize.doctor.examine` applies them and puts the largest gain first.
"""
