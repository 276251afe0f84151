"""The first interval of TaylorSeer is one step long, whatever cache_interval is."""

# subjects: taylorseer
import sys

import torch
from diffusers import TaylorSeerCacheConfig, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel

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
pipe.transformer.blocks[0].ffn.register_forward_hook(lambda *_: calls.append(len(steps)))
steps = []
pipe.transformer.register_forward_hook(lambda *_: steps.append(0))
blocks = dict(cache_identifiers=[r"blocks\.\d+"])
pipe.transformer.enable_cache(TaylorSeerCacheConfig(cache_interval=5, disable_cache_before_step=2, **blocks))
render(seed=1, guidance_scale=1.0)
print(f"computed at steps {calls}; with an interval of 5, steps 2 to 5 were to be predicted from 0 and 1")
sys.exit(1 if 3 in calls else 0)
