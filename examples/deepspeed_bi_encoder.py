"""Train a text-text bi-encoder from transformers under ZeRO 3, in micro-batches, with the full-batch gradient.

    deepspeed --num_gpus 2 examples/deepspeed_bi_encoder.py

One BERT embeds both sides. Only LoRA adapters (peft) are trained; with --full, all weights are. The model is built from
a config, so nothing is downloaded. For fine-tuning, use AutoModel.from_pretrained instead.
"""

import argparse
import os

import deepspeed
import torch
from peft import LoraConfig, get_peft_model
from torch.nn import functional as F
from transformers import BertConfig, BertModel

from disco_ds import build_loss, contrastive_step

VOCABULARY, LENGTH = 1000, 12


class Encoder(torch.nn.Module):
    def __init__(self, lora: bool) -> None:
        super().__init__()
        config = BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=128,
        )
        self.bert = BertModel(config, add_pooling_layer=False)
        if lora:
            self.bert = get_peft_model(
                self.bert, LoraConfig(r=8, target_modules=["query", "value"], lora_dropout=0.1)
            )

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        hidden = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        weights = attention_mask[..., None].to(hidden.dtype)
        return F.normalize(((hidden * weights).sum(1) / weights.sum(1)).float(), dim=-1)


def questions_and_answers(
    count: int, generator: torch.Generator
) -> dict[str, dict[str, torch.Tensor]]:
    """Generate pairs. An answer has its question's tokens in reverse order, and the last three are masked."""
    tokens = torch.randint(10, VOCABULARY, (count, LENGTH), generator=generator)
    mask = torch.ones_like(tokens)
    cut = (torch.arange(LENGTH) < 9).long().expand(count, LENGTH)
    return {
        "question": {"input_ids": tokens, "attention_mask": mask},
        "answer": {"input_ids": tokens.flip(1), "attention_mask": cut},
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=64, help="pairs per rank")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--full", action="store_true", help="train all weights")
    parser.add_argument("--local_rank", type=int)  # deepspeed's launcher passes it
    given = parser.parse_args()

    deepspeed.init_distributed()
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.manual_seed(0)
    model = Encoder(lora=not given.full)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    config = {
        "train_batch_size": given.batch * ranks,
        "train_micro_batch_size_per_gpu": given.batch // given.micro_batches,
        "gradient_accumulation_steps": given.micro_batches,  # as in contrastive_step below
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": given.stage},
        "bf16": {"enabled": torch.cuda.is_available()},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.AdamW(trained, lr=1e-3 if given.full else 1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    loss = build_loss("disco_fused")

    def forward(batch: dict[str, dict[str, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
        return engine(**batch["question"]), engine(**batch["answer"])

    generator = torch.Generator().manual_seed(rank)
    values = []
    for _ in range(given.steps):
        pairs = questions_and_answers(given.batch, generator)
        batch = {
            side: {key: x.to(engine.device) for key, x in part.items()}
            for side, part in pairs.items()
        }
        out = contrastive_step(
            engine, loss, batch, forward, micro_batches=given.micro_batches, scale=20.0
        )
        values.append(out.metrics["loss"].item())
    if rank == 0:
        size = f"{ranks} ranks, global batch {given.batch * ranks} in {given.micro_batches} micro-batches per rank"
        print(f"{size}, ZeRO {given.stage}: loss {values[0]:.3f} -> {values[-1]:.3f}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
