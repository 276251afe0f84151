"""A pipeline whose cache was disabled cannot run while another of its class is enabled."""

# subjects: cache-dit
import sys

import cache_dit
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
few = cache_dit.DBCacheConfig(Fn_compute_blocks=1, residual_diff_threshold=0.5, max_warmup_steps=2)
other = WanPipeline(None, None, None, unipc, WanTransformer3DModel(**sizes, ffn_dim=32, num_layers=4))
for each in (pipe, other):
    cache_dit.enable_cache(each, cache_config=few)
cache_dit.disable_cache(pipe)
try:
    render(seed=1)
except AttributeError as error:
    print(f"AttributeError: {error}")
    sys.exit(1)
