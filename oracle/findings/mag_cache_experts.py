"""On two experts MagCache gives the second one the ratios of the first one's steps."""

# subjects: mag-cache
import sys

import torch
from diffusers import MagCacheConfig, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel

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
pipe = WanPipeline(None, None, None, unipc, model, low, boundary_ratio=0.6)
calls = []
for name, each in (("high", model), ("low", low)):
    ratios = [0.0] * 4 + [1.0] * 4  # reuse nothing in steps 0 to 3, and all that can be in steps 4 to 7
    each.enable_cache(MagCacheConfig(mag_ratios=ratios, num_inference_steps=8, retention_ratio=0.0, max_skip_steps=9))
    each.register_forward_pre_hook(lambda *_, name=name: calls.append([name, "reused"]))
    each.blocks[0].ffn.register_forward_hook(lambda *_: calls[-1].__setitem__(1, "computed"))
render(seed=1, guidance_scale=1.0)
print(f"by their ratios steps 5 to 7 can be reused, all of the low-noise expert; what came: {calls}")
sys.exit(1 if ["low", "reused"] not in calls else 0)
