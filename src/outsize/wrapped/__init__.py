"""A model that is streamed inside and a `torch.nn.Module` outside, for training loops of the user's own."""
