"""The engine: lanes that walk the programs of a plan over the memory that the plan asks for."""
