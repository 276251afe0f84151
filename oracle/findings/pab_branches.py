"""The uncond branch of Wan takes the attention of the cond branch, in every step."""

# subjects: pyramid-attention-broadcast
import sys

import torch
from diffusers import PyramidAttentionBroadcastConfig, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel

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
calls = []
pipe.transformer.register_forward_pre_hook(lambda *_: calls.append(0))
pipe.transformer.blocks[0].attn1.to_q.register_forward_hook(lambda *_: calls.append(calls.pop() + 1))
whole = dict(spatial_attention_block_skip_range=2, spatial_attention_timestep_skip_range=(-1, 1001))
now = lambda: float(pipe.current_timestep)
pipe.transformer.enable_cache(PyramidAttentionBroadcastConfig(current_timestep_callback=now, **whole))
render(seed=1)
cond, uncond = calls[::2], calls[1::2]
print(f"self-attention of block 0 was computed in {sum(cond)} of 8 cond and in {sum(uncond)} of 8 uncond calls")
sys.exit(0 if any(uncond) else 1)
