"""A request that failed leaves its residuals behind, and the next one reuses them."""

# subjects: first-block-cache, mag-cache, taylorseer
import sys

import torch
from diffusers import FirstBlockCacheConfig, MagCacheConfig, TaylorSeerCacheConfig
from diffusers import UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel

torch.manual_seed(0)
sizes = dict(num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16, freq_dim=16)
model = WanTransformer3DModel(**sizes, ffn_dim=32, num_layers=4)
texts = dict(prompt_embeds=torch.randn(1, 8, 16), negative_prompt_embeds=torch.randn(1, 8, 16))
unipc = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True)
pipe = WanPipeline(None, None, None, unipc, model)
asked = dict(height=32, width=32, num_frames=5, num_inference_steps=8, output_type="latent", **texts)
fail = lambda pipe, step, timestep, tensors: tensors if step < 3 else 1 / 0
render = lambda seed, **more: pipe(generator=torch.Generator().manual_seed(seed), **asked, **more).frames
shown, mag = [], MagCacheConfig(mag_ratios=[1.0] * 8, num_inference_steps=8, threshold=0.5)
for config in (FirstBlockCacheConfig(0.5), mag, TaylorSeerCacheConfig(2, 2, cache_identifiers=[r"blocks\.\d+"])):
    pipe.transformer.enable_cache(config)
    fresh = render(1)
    try:
        render(2, callback_on_step_end=fail)
    except ZeroDivisionError:
        shown += [] if torch.equal(render(1), fresh) else [type(config).__name__]
    pipe.transformer.disable_cache()
print("other latents after a request that failed:", ", ".join(shown) or "none")
sys.exit(1 if shown else 0)
