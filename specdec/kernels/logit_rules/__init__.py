"""What a request's own rules make of its logits: bias, penalties, allowed ids, one forced id; in this order, per row.

A row's history is its request's, and the drafts of its own block in front of it: nothing is written for those, so a
rejected draft leaves no trace. Formulas: repetition as in CTRL (Keskar et al., 2019), presence and frequency as in
OpenAI's API.
"""

from dataclasses import dataclass

from torch import Tensor

from specdec.kernels.dispatch import Implementations

_implementation = Implementations(__name__, cuda='triton')


@dataclass(frozen=True, slots=True)
class RuleTables:
    """One row per slot. counts [S, V] int32: 2 for every time that the request emitted the id, 1 more if its prompt has
    it. penalties [S, 3] fp32: repetition, presence, frequency. bias_ids, bias_values [S, n], of which the first
    num_bias [S] count. masks [S, K + 1, V / 32] int32: bit v % 32 of word v // 32 allows id v on the row of that step.
    """

    counts: Tensor
    penalties: Tensor
    bias_ids: Tensor
    bias_values: Tensor
    num_bias: Tensor
    masks: Tensor


@dataclass(frozen=True, slots=True)
class RuleRows:
    """Whose the rows are. requests [R]: which of the P; steps [R]: how many drafts of the block are in front of the
    row; slots [P]; drafts [P, K]. All int64.
    """

    requests: Tensor
    steps: Tensor
    slots: Tensor
    drafts: Tensor


def apply_rules(
    logits: Tensor,
    rows: RuleRows,
    tables: RuleTables,
    *,
    bias: bool,
    penalties: bool,
    masks: bool,
    forced: Tensor | None,
) -> Tensor:
    """logits [R, V] fp32 -> the same in new memory, with the rules that are switched on.

    l + bias; then, for ids of prompt or output, l / repetition if l > 0, else l * repetition; then
    l - frequency * times emitted - presence * (emitted at all); -inf where a mask's bit is 0; -inf for all but
    `forced` [R] where that is not negative.
    """
    apply = _implementation(logits.device.type, 'apply_rules')
    return apply(logits, rows, tables, bias, penalties, masks, forced)
