"""Four steps of Lightning's Trainer with DDP."""

import os
from typing import Any

import lightning
import torch


class OneLayer(lightning.LightningModule):  # type: ignore[misc]  # it is untyped here
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch: Any, _: int) -> Any:
        loss = self.layer(batch).square().mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


lightning.seed_everything(1)
model = OneLayer()
trainer = lightning.Trainer(
    accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy="ddp", max_steps=4,
    logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False,
)  # fmt: skip
trainer.fit(model, torch.utils.data.DataLoader(torch.randn(32, 8), batch_size=4))
total, loss = model.layer.weight.double().sum().item(), float(trainer.callback_metrics["loss"])
print("rank", trainer.global_rank, "of", trainer.world_size, f"{total:.9f} {loss:.9f}", flush=True)
