"""Fine-tune a Flux transformer by flow matching, on cached latents and texts that are made on the spot.

    python examples/diffusion/flux.py path/to/transformer                     # adapters for `load_lora_weights`
    python examples/diffusion/flux.py path/to/transformer --base-codec nf4    # over a base in 4 bits
    python examples/diffusion/flux.py path/to/transformer --full              # all weights

Started again, it goes on from the last checkpoint of its directory, with the bits of a run that was not stopped.
"""

import outsize

import argparse
from pathlib import Path

import torch
from diffusers import FluxPipeline, FluxTransformer2DModel
from peft import LoraConfig, get_peft_model_state_dict

parser = argparse.ArgumentParser()
parser.add_argument("model", type=Path)
parser.add_argument("--out", type=Path, default=Path("runs/flux"))
parser.add_argument("--full", action="store_true")
parser.add_argument("--base-codec", default="raw", choices=["raw", "fp8", "nf4"])
parser.add_argument("--steps", type=int, default=4)
options = parser.parse_args()

torch.manual_seed(0)
model = FluxTransformer2DModel.from_pretrained(options.model, torch_dtype=torch.float32).train()
sizes = model.config
if not options.full:
    model.requires_grad_(False)
    layers = ["to_q", "to_k", "to_v", "to_out.0", "proj_mlp"]
    model.add_adapter(LoraConfig(r=4, lora_alpha=4, target_modules=layers, init_lora_weights="gaussian"))
outsize.wrap(model, device_memory="1GiB", home="host", base_codec=options.base_codec)
trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
optimizer = torch.optim.AdamW(trained.values(), lr=1e-3, fused=True)

# What a VAE and text encoders have made of pictures of 4 x 4 patches and their captions, once, before the training.
latents = torch.randn(8, 16, sizes.in_channels)
texts, pooled = torch.randn(8, 6, sizes.joint_attention_dim), torch.randn(8, sizes.pooled_projection_dim)
places = torch.cartesian_prod(torch.zeros(1), torch.arange(4.0), torch.arange(4.0))
guidance = torch.ones(4) if sizes.guidance_embeds else None

options.out.mkdir(parents=True, exist_ok=True)
checkpoint, partial, losses = options.out / "checkpoint.pt", options.out / "partial.pt", []
if checkpoint.exists():
    saved = torch.load(checkpoint)
    losses = saved["losses"]
    optimizer.load_state_dict(saved["optimizer"])
    torch.set_rng_state(saved["random"])
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(saved["weights"][name])
for step in range(len(losses), options.steps):
    rows = torch.randint(len(latents), (4,))
    noise, time = torch.randn_like(latents[rows]), torch.randn(4).sigmoid()
    mixed = latents[rows].lerp(noise, time[:, None, None])
    given = {"encoder_hidden_states": texts[rows], "pooled_projections": pooled[rows], "guidance": guidance}
    predicted = model(mixed, timestep=time, img_ids=places, txt_ids=torch.zeros(6, 3), **given).sample
    loss = (predicted - (noise - latents[rows])).square().mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
    if (step + 1) % 2 == 0:
        weights = {name: parameter.detach().clone() for name, parameter in trained.items()}
        state = {"weights": weights, "optimizer": optimizer.state_dict(), "losses": losses}
        torch.save({**state, "random": torch.get_rng_state()}, partial)
        partial.replace(checkpoint)
print(losses)
if options.full:
    model.save_pretrained(options.out / "transformer")
else:
    adapters = {name: value.clone() for name, value in get_peft_model_state_dict(model).items()}
    FluxPipeline.save_lora_weights(options.out, transformer_lora_layers=adapters)
