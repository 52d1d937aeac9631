"""M6: image patches and text in one sequence, prefix attention, one loss for every task.

Place in the flow: a user's model. What is source and what is target is said per row by numbers, not
by code: the forward has no branch on values, so one trace serves every task, and all inputs have
the batch as dim 0.

Shapes: B batch, P patches, S text tokens, N = P + S positions, D model dim, V vocabulary.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from whale.models.m6.config import M6Config
from whale.models.m6.layers import Block, TextStem, make_stem, prefix_mask
from whale.models.m6.tokenizer import PAD

IGNORED = -100
"""The label of a position that is not learned from: what `F.cross_entropy` leaves out."""


class M6(nn.Module):
    """Patches and tokens in, next-token logits of the text out, with their loss.

    Example:
        >>> model = M6(replace(presets["m6-tiny"], num_experts=0))
        >>> batch = example_batch(model.config, rows=2)
        >>> model(**batch)["logits"].shape
        torch.Size([2, 64, 6144])
    """

    def __init__(self, config: M6Config) -> None:
        super().__init__()
        self.config = config
        self.patch_stem = make_stem(config)
        self.text_stem = TextStem(config)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = _shared_blocks(config) if config.share_layers else _own_blocks(config)
        self.norm = nn.LayerNorm(config.dim)
        self.lm_head = nn.Linear(config.dim, config.vocab_size, bias=False)
        for module in self.modules():
            # Norms and experts have drawn their own.
            if isinstance(module, nn.Linear | nn.Embedding | nn.Conv2d):
                self._init_weights(module)
        if config.tie_embeddings:
            self.lm_head.weight = self.text_stem.token_embedding.weight

    def forward(
        self,
        tokens: Tensor,
        patches: Tensor,
        num_source: Tensor,
        has_image: Tensor,
        labels: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """The logits [B, S, V] of the text and, with labels, the mean loss over those that count.

        In training, experts that have a loss of their own add it.

        Args:
            tokens: text token ids [B, S], source then target, padded at the end.
            patches: patch vectors [B, P, patch_dim]; anything where a row has no picture.
            num_source: positions [B] that are source: P, whether there is a picture or not, and the
                tokens of the source.
            has_image: whether a row has a picture [B], bool.
            labels: the token after each position [B, S]; -100 where none is to be learned.
        """
        num_patches, num_text = patches.shape[1], tokens.shape[1]
        mask_b1nn = prefix_mask(num_source, has_image, num_patches, num_text)
        text_bsd = self.text_stem(tokens, num_source - num_patches)
        x_bnd = self.dropout(torch.cat([self.patch_stem(patches), text_bsd], dim=1))
        pictured = has_image[:, None].expand(-1, num_patches)
        valid_bn = torch.cat([pictured, tokens != PAD], dim=1)
        expert_losses = []
        for block in self.blocks:
            x_bnd = block(x_bnd, mask_b1nn, valid_bn)
            if block.has_loss:
                x_bnd, expert_loss = x_bnd
                expert_losses.append(expert_loss)
        logits_bsv = self.lm_head(self.norm(x_bnd[:, num_patches:]))
        if labels is None:
            return {"logits": logits_bsv}
        loss = F.cross_entropy(logits_bsv.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
        if self.training:
            # Of use to training only: what is evaluated is how well the text is known.
            loss = sum(expert_losses, loss)
        return {"loss": loss, "logits": logits_bsv}

    def _init_weights(self, module: nn.Module) -> None:
        """Normal weights by fan-in, embeddings of length one, zero biases: of one module alone.

        A method, so that Whale draws a model on the meta device the same way.
        """
        if isinstance(module, nn.Linear):
            gain = getattr(module, "init_gain", 1.0)
            nn.init.normal_(module.weight, std=gain * module.in_features**-0.5)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=module.embedding_dim**-0.5)
        elif isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
        elif hasattr(module, "reset_parameters"):
            module.reset_parameters()  # type: ignore[operator]


def _own_blocks(config: M6Config) -> nn.ModuleList:
    return nn.ModuleList(Block(config, i) for i in range(config.num_layers))


def _shared_blocks(config: M6Config) -> nn.ModuleList:
    """Every block a module of its own, all with the parameters of the first of their kind.

    So paths, dropout masks and expert counters are a layer's own, as they are after `delink`.
    """
    period = config.moe_every if config.num_experts else 1
    blocks = [Block(config, i) for i in range(period)]
    for i in range(period, config.num_layers):
        first = blocks[i % period]
        # deepcopy takes what the memo holds as already copied.
        blocks.append(copy.deepcopy(first, {id(p): p for p in first.parameters()}))
    return nn.ModuleList(blocks)


def delink(model: M6) -> M6:
    """The same model with every layer owning a copy of what it shared: the real stage.

    It computes what the shared one computes, and its state dict has the same keys; so the state of
    a shared model can also be loaded into a model that never was.
    """
    real = copy.deepcopy(model)
    real.config = replace(model.config, share_layers=False)
    seen: set[int] = set()
    for module in real.blocks.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) in seen:
                own = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
                setattr(module, name, own)
            seen.add(id(parameter))
    return real
