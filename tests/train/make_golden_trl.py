"""Writes golden_trl.json: the numbers that TRL's own trainers compute on the fixed arrays of `inputs`.

python -m tests.train.make_golden_trl

The methods that compute the losses are called unchanged, on a stand-in for their trainer. Everything is in float64
except ORPO, which TRL computes in float32.
"""

import collections
import functools
import inspect
import json
import pathlib
import textwrap
from types import SimpleNamespace as Namespace
from typing import Any

import numpy as np


FILE = pathlib.Path(__file__).with_name("golden_trl.json")
PAIRS, SEQ, VOCAB, GROUP = 4, 9, 13, 4
WEIGHTS, CISPO_HIGH, HIGH_ENTROPY = (1.0, 0.5), 1.28, 0.4  # of rewards; TRL's bound of ratios; share of tokens
BETA = 0.3
TOP_K = 4  # largest logits
OVERLONG, LENGTHS = (20, 8), (0, 11, 12, 13, 16, 19, 20)  # most tokens, and those that are punished; completions

Arrays = dict[str, np.ndarray]


def inputs() -> Arrays:
    """Returns logits of two models on pairs (first all chosen, then all rejected), and the losses' other inputs."""
    random = np.random.RandomState(0)
    rows = 2 * PAIRS
    starts, ends = random.randint(1, 4, rows), random.randint(6, SEQ + 1, rows)
    at = np.arange(SEQ)
    return {
        "logits": 2 * random.randn(rows, SEQ, VOCAB),
        "ref_logits": 2 * random.randn(rows, SEQ, VOCAB),
        "tokens": random.randint(0, VOCAB, (rows, SEQ)),
        "completion": ((at >= starts[:, None]) & (at < ends[:, None])).astype(int),
        "attention": (at < ends[:, None]).astype(int),
        "label": random.rand(rows) < 0.5,
        "kl_logps": random.randn(rows) + 1.5,
        "ref_kl_logps": random.randn(rows),
        "logps": -2 * random.rand(rows, SEQ),
        "old": -2 * random.rand(rows, SEQ),
        "ref": -2 * random.rand(rows, SEQ),
        "rewards": random.rand(rows),
        "rewards_of_each": random.rand(rows, 2) * [1, 10],
        "entropy": 3 * random.rand(rows, SEQ),
    }


class Trainer(Namespace):
    """A stand-in for a trainer in its methods: it has these attributes, and None for any other."""

    def __init__(self, **attributes: Any):
        import torch

        same = lambda x, **_: x
        accelerator = Namespace(
            device=torch.device("cpu"),
            num_processes=1,
            gather=same,
            gather_for_metrics=same,
            reduce=same,
            pad_across_processes=same,
        )
        metrics = {"train": collections.defaultdict(list)}
        model = torch.nn.Identity()
        model.is_gradient_checkpointing = False
        fixed = dict(accelerator=accelerator, model=model, _metrics=metrics, _total_train_tokens=0, _tp_size=1)
        super().__init__(**{"beta": BETA, **fixed, **attributes})

    def __getattr__(self, name: str) -> None:
        return None


def numbers() -> dict[str, list[float]]:
    """Returns TRL's numbers by the name of the loss."""
    import torch
    from torch.nn import functional
    from trl.experimental.gkd.gkd_trainer import GKDTrainer
    from trl.experimental.orpo.orpo_trainer import ORPOTrainer
    from trl.experimental.sdft.loss_utils import compute_topk_self_distillation_loss
    from trl.rewards import get_soft_overlong_punishment
    from trl.trainer import grpo_trainer
    from trl.trainer.dpo_trainer import DPOTrainer
    from trl.trainer.grpo_trainer import GRPOTrainer
    from trl.trainer.kto_trainer import KTOTrainer
    from trl.trainer.rloo_trainer import RLOOTrainer

    given = {name: torch.as_tensor(a) for name, a in inputs().items()}

    def model(logits: Any) -> Any:
        def forward(input_ids: Any, labels: Any, **_: Any) -> Any:
            of_targets = functional.log_softmax(logits, -1)[:, :-1].gather(2, input_ids[:, 1:, None])[..., 0]
            zeros = torch.zeros_like(of_targets)
            return Namespace(
                log_probs=torch.where(labels[:, 1:] == -100, zeros, of_targets),
                entropy=zeros, mean_logits=zeros, is_top1=zeros.bool(),
            )  # fmt: skip

        return forward

    policy, reference = model(given["logits"]), model(given["ref_logits"])
    batch = dict(input_ids=given["tokens"], attention_mask=given["attention"], completion_mask=given["completion"])
    found = {}

    # ------------------------------------------------------------------------------------------ trl/trainer/dpo_trainer
    def dpo(loss: str, rows: Any = slice(None), **attributes: Any) -> Trainer:
        trainer = Trainer(
            ref_model=model(given["ref_logits"][rows]), loss_types=[loss], loss_weights=[1.0],
            f_divergence_type="reverse_kl", args=Namespace(gradient_checkpointing_kwargs=None), **attributes,
        )  # fmt: skip
        part = {name: a[rows] for name, a in batch.items()}
        trainer.loss = DPOTrainer._compute_loss(trainer, model(given["logits"][rows]), part, False).item()
        return trainer

    found["dpo"] = [dpo("sigmoid").loss]
    found["ipo"] = [dpo("ipo").loss]
    # TRL has label smoothing as in cDPO only for "aot", which is DPO if there is a single pair to sort.
    pairs = [torch.tensor([i, i + PAIRS]) for i in range(PAIRS)]
    found["dpo_smoothed"] = [dpo("aot", rows, label_smoothing=0.2).loss for rows in pairs]
    metrics = dpo("sigmoid")._metrics["train"]
    found["dpo_metrics"] = [metrics[f"rewards/{name}"][0] for name in ("chosen", "rejected", "margins", "accuracies")]

    # ------------------------------------------------------------------------------- trl/experimental/orpo/orpo_trainer
    average = lambda rows: ORPOTrainer.get_batch_logps(
        given["logits"][rows], given["tokens"][rows].masked_fill(given["completion"][rows] == 0, -100), True
    )
    chosen, rejected = average(slice(0, PAIRS)), average(slice(PAIRS, None))
    found["orpo_chosen_logps"] = chosen.tolist()
    found["orpo_odds_ratio"] = ORPOTrainer.odds_ratio_loss(Trainer(), chosen, rejected)[0].tolist()

    # ------------------------------------------------------------------------------------------ trl/trainer/kto_trainer
    def kto(**attributes: Any) -> list[float]:
        kl = iter((given["kl_logps"], given["ref_kl_logps"]))  # of the policy, then of the reference
        trainer = Trainer(
            ref_model=reference, loss_type="kto", calculate_KL=True, _compute_kl_logps=lambda *_: next(kl),
            args=Namespace(gradient_checkpointing_kwargs=None), **attributes,
        )  # fmt: skip
        loss = KTOTrainer._compute_loss(trainer, policy, batch | {"label": given["label"]}, False)
        return [loss.item(), trainer._metrics["train"]["kl"][0]]

    found["kto"] = kto(desirable_weight=1.0, undesirable_weight=1.0)
    found["kto_weighted"] = kto(desirable_weight=0.7, undesirable_weight=1.3)

    # ----------------------------------------------------------------------------------------- trl/trainer/grpo_trainer
    source = textwrap.dedent(inspect.getsource(GRPOTrainer._generate_and_score_completions))
    start = source.index("        mean_grouped_rewards = torch.nanmean(")
    end = source.index("        is_std_zero", start)

    def advantages(scale: str) -> Any:
        names = dict(
            vars(grpo_trainer), rewards=given["rewards"], num_generations=GROUP, self=Namespace(scale_rewards=scale)
        )
        exec(textwrap.dedent(source[start:end]), names)
        return names["advantages"]

    def executed(source: str, name: str, **values: Any) -> Any:
        names = dict(vars(grpo_trainer), num_generations=GROUP, device="cpu", **values)
        exec(textwrap.dedent(source), names)
        return names[name].tolist()

    first = source.index("        grouped = rewards_per_func.view(")
    each = given["rewards_of_each"]
    found["advantages_gdpo"] = executed(
        source[first : source.index("        is_std_zero", first)], "advantages", rewards_per_func=each,
        unscorable_mask=torch.isnan(each).all(dim=1),
        self=Namespace(reward_funcs=each[0], reward_weights=torch.tensor(WEIGHTS)),
    )  # fmt: skip
    of_rloo = textwrap.dedent(inspect.getsource(RLOOTrainer._generate_and_score_completions))
    first = of_rloo.index("    grouped_rewards = rewards.view(")
    found["advantages_rloo"] = executed(
        of_rloo[first : of_rloo.index("    # Normalize advantages over", first)], "advantages",
        rewards=given["rewards"],
    )  # fmt: skip
    found["advantages"] = advantages("group").tolist()
    found["advantages_unscaled"] = advantages("none").tolist()

    def grpo(loss: str, level: str = "token", beta: float = 0.0, high: float = 0.28, share: float = 1.0) -> list[float]:
        logps = given["logps"].clone().requires_grad_()
        trainer = Trainer(
            loss_type=loss, importance_sampling_level=level, beta=beta, epsilon_low=0.2, epsilon_high=high,
            top_entropy_quantile=share, max_completion_length=SEQ, current_gradient_accumulation_steps=1,
            args=Namespace(
                delta=None, use_bias_correction_kl=False, steps_per_generation=1, sapo_temperature_pos=1.0,
                sapo_temperature_neg=1.05,
            ),
            _get_per_token_logps_and_entropies=lambda *_, **__: (logps, given["entropy"], None),
        )  # fmt: skip
        trainer.get_high_entropy_mask = functools.partial(GRPOTrainer.get_high_entropy_mask, trainer)
        mask = given["completion"]
        loss = GRPOTrainer._compute_loss(trainer, None, dict(
            prompt_ids=mask[:, :0], prompt_mask=mask[:, :0], completion_ids=mask, completion_mask=mask,
            advantages=advantages("group"), old_per_token_logps=given["old"], ref_per_token_logps=given["ref"],
            num_items_in_batch=mask.sum(),
        ))  # fmt: skip
        loss.backward()
        metrics = trainer._metrics["train"]
        looks = [*metrics["clip_ratio/region_mean"], *metrics["cispo_clip_ratio"], *metrics["kl"]]
        return [loss.item(), torch.linalg.vector_norm(logps.grad).item(), *looks]

    for loss in ("grpo", "dapo", "dr_grpo"):
        found[loss] = grpo(loss)
    found["grpo_kl"] = grpo("grpo", beta=0.04)
    found["gspo"] = grpo("grpo", level="sequence")
    found["cispo"] = grpo("cispo", high=CISPO_HIGH)
    found["sapo"] = grpo("sapo")
    found["high_entropy"] = grpo("dapo", share=HIGH_ENTROPY)

    # --------------------------------------------------------------------------------- trl/experimental/gkd/gkd_trainer
    for name, beta in (("forward_kl", 0.0), ("jsd", 0.3), ("reverse_kl", 1.0)):
        per_word = GKDTrainer.generalized_jsd_loss(
            given["logits"], given["ref_logits"], beta=beta, temperature=1.7, reduction="none"
        )
        found[name] = per_word.sum(-1)[0].tolist()

    def gkd(beta: float) -> list[float]:
        """Returns the loss of a batch of completions, and the norm of its gradient."""
        logits = given["logits"].clone().requires_grad_()
        teacher = lambda **_: Namespace(logits=given["ref_logits"])
        teacher.eval = lambda: None
        trainer = Trainer(teacher_model=teacher, beta=beta, generalized_jsd_loss=GKDTrainer.generalized_jsd_loss)
        labels = given["tokens"].masked_fill(given["completion"] == 0, -100)
        rows = dict(input_ids=given["tokens"], attention_mask=given["attention"], labels=labels)
        loss = GKDTrainer.compute_loss(trainer, lambda **_: Namespace(logits=logits), rows)
        loss.backward()
        return [loss.item(), torch.linalg.vector_norm(logits.grad).item()]

    found["gkd"], found["gkd_reverse"] = gkd(0.3), gkd(1.0)

    # --------------------------------------------------------------------------------- trl/experimental/sdft/loss_utils
    # It takes the student's largest logits. Here they are the teacher's, so the two change places.
    for name, beta in (("top_k_forward", 0.0), ("top_k_jsd", 0.3), ("top_k_reverse", 1.0)):
        found[name] = compute_topk_self_distillation_loss(
            given["ref_logits"] / 1.7, given["logits"] / 1.7,
            distillation_topk=TOP_K, distillation_alpha=1 - beta, distillation_add_tail=True,
        )[0].tolist()  # fmt: skip

    # ---------------------------------------------------------------------------------------- trl/rewards/other_rewards
    found["overlong"] = get_soft_overlong_punishment(*OVERLONG)([[0] * n for n in LENGTHS])
    return found


if __name__ == "__main__":
    import trl

    content = {"source": f"TRL {trl.__version__}, by tests/train/make_golden_trl.py", **numbers()}
    FILE.write_text(json.dumps(content, indent=1) + "\n")
