"""A deep copy of a cached transformer computes with the weights of the original."""

# subjects: cache-dit
import copy
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

cache_dit.enable_cache(pipe, cache_config=cache_dit.DBCacheConfig(Fn_compute_blocks=1))
twin = copy.deepcopy(model)
for weight in twin.blocks.parameters():
    weight.data.zero_()
ran = []
model.blocks[0].ffn.register_forward_hook(lambda *_: ran.append(1))
twin(torch.randn(1, 4, 2, 4, 4), torch.tensor([900.0]), texts["prompt_embeds"])
print(f"the copy was called once: a block of the original ran {len(ran)} times")
sys.exit(1 if ran else 0)
