"""A number of frames that does not fit is rounded with a line in the log, and no error."""

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
frames = render(seed=1, num_frames=6).shape[2] * 4 - 3
print(f"6 frames were asked, and {frames} came")
sys.exit(0 if frames == 6 else 1)
