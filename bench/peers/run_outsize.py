"""This project: the same training, streamed.

``--option`` says where the state rests: ``disk``, ``host``, and with ``-compiled`` behind it that blocks are compiled.
"""

from harness import ADAMW, COMPILED, Job, Recorder

from outsize.config import Config, load_config
from outsize.runtime.device.heap import own_process
from outsize.training.records import StepRecord
from outsize.training.run import train


def configuration(job: Job) -> Config:
    """Return the run: the flags of ``outsize train`` and the keys of its ``--set``, by their full names."""
    _, microbatches, sequences, seq_len = job.input_ids().shape
    home, _, variant = job.option.partition("-")
    keys = {
        "model.path": str(job.model),
        "model.dtype": "fp32",
        "model.compile": "blocks" if variant == COMPILED else "off",
        "data.path": str(job.data / "tokens.npy"),
        "data.format": "tokens",
        "data.seq_len": seq_len,
        "train.steps": job.steps,
        "train.tokens_per_step": microbatches * sequences * seq_len,
        "train.microbatches": microbatches,
        "train.seed": 0,
        "train.run_dir": str(job.run_dir),
        "optimizer.schedule": "constant",
        "optimizer.max_grad_norm": 0.0,
        "memory.device": "cpu",
        "memory.device_memory": job.device_memory,
        "memory.home": home or "disk",
        **{f"optimizer.{name}": value for name, value in ADAMW.items()},
    }
    return load_config(None, (), keys)


def main() -> None:
    own_process()  # as `outsize train` does
    job = Job.from_arguments()
    config = configuration(job)
    recorder = Recorder(job)

    def note(record: StepRecord) -> None:
        recorder.step(record.loss, record.seconds)

    result = train(config, progress=note)
    recorder.finish(
        budget_bytes=result.budget_bytes, stall_share=result.stall_share, stall_owner=result.stall_owner
    )


if __name__ == "__main__":
    main()
