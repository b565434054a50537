"""Training by trainers of TRL and transformers over streamed models: what `train.objective` names besides sft."""
