"""The files of a checkpoint in Hugging Face layout, read and written unit by unit."""
