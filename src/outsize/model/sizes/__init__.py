"""What a model is, in numbers: units, bytes and FLOPs. No torch."""
