"""Three steps of Lightning's Trainer with FSDP, a small decoder and random tokens."""

import os
from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import FSDPStrategy
from torch import Tensor, nn
from torch.nn import functional

WORDS, WIDTH, SEQUENCE = 8_192, 1_024, 512


class Decoder(lightning.LightningModule):  # type: ignore[misc]  # it is untyped here
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 8, 4 * WIDTH, 0.0, batch_first=True, norm_first=True)
            for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, WORDS)

    def training_step(self, batch: Tensor, _: int) -> Any:
        mask = nn.Transformer.generate_square_subsequent_mask(SEQUENCE, device=self.device)
        x = self.embedding(batch)
        for layer in self.layers:
            x = layer(x, mask.to(x.dtype), is_causal=True)
        loss = functional.cross_entropy(self.head(x).flatten(0, 1).float(), batch.flatten())
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


lightning.seed_everything(1, verbose=False)
trainer = lightning.Trainer(
    accelerator="cuda", devices=int(os.environ["LOCAL_WORLD_SIZE"]), max_steps=3,
    strategy=FSDPStrategy(auto_wrap_policy={nn.TransformerEncoderLayer}), precision="bf16-mixed",
    gradient_clip_val=None, logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False,
)  # fmt: skip
data = torch.randint(0, WORDS, (256, SEQUENCE))
trainer.fit(Decoder(), torch.utils.data.DataLoader(data, batch_size=4))
