"""guidance_scale_2 alone is not honoured: without guidance_scale above 1 there is no uncond branch."""

# subjects: diffusers
import sys

import torch
from diffusers import UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel

torch.manual_seed(0)
sizes = dict(num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16, freq_dim=16)
model = WanTransformer3DModel(**sizes, ffn_dim=32, num_layers=4)
texts = dict(prompt_embeds=torch.randn(1, 8, 16), negative_prompt_embeds=torch.randn(1, 8, 16))
unipc = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True)
pipe = WanPipeline(None, None, None, unipc, model)
asked = dict(
    height=32, width=32, num_frames=5, num_inference_steps=8, guidance_scale=4.0, output_type="latent", **texts
)
render = lambda seed, **more: pipe(generator=torch.Generator().manual_seed(seed), **{**asked, **more}).frames
low = WanTransformer3DModel(**sizes, ffn_dim=32, num_layers=4)
pipe = WanPipeline(None, None, None, unipc, model, low, boundary_ratio=0.9)
calls = []
low.register_forward_pre_hook(lambda *_: calls.append(1))
render(seed=1, guidance_scale=1.0, guidance_scale_2=4.0)
alone = len(calls)
render(seed=1, guidance_scale=1.0, guidance_scale_2=1.0)
print(f"calls of the low-noise expert: {alone} with guidance_scale_2=4, {len(calls) - alone} without guidance")
sys.exit(1 if alone == len(calls) - alone else 0)
