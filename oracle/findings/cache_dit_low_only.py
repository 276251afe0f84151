"""Stock cache-dit on a pipeline with the low-noise expert alone fails with an unrelated error."""

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

low = WanPipeline(None, None, None, unipc, transformer=None, transformer_2=model, boundary_ratio=1.0)
try:
    cache_dit.enable_cache(low, cache_config=cache_dit.DBCacheConfig(Fn_compute_blocks=1))
except Exception as error:
    print(f"{type(error).__name__}: {error}")
    sys.exit(0 if isinstance(error, ValueError) else 1)
