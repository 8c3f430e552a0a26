"""What becomes of a linear weight by its module's name: an engine's profile decides, or the generic rule.

Names repeat: a large model has one kind of name in thousands of layers and experts. So a rule is asked once for each
*template*, a name whose numbers are left open, and answers in ``Pattern``s that are filled with a name's own numbers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from operator import itemgetter
from typing import NamedTuple, Protocol

from fp8fs.core.fusion import FUSIONS, Fusion, leaf_table
from fp8fs.core.profiles import Profile

__all__ = [
    "EXCLUDED_WORDS",
    "GenericRule",
    "Numbers",
    "Pattern",
    "ProfileRule",
    "Rule",
    "Ruling",
    "split_numbers",
]

EXCLUDED_WORDS: tuple[tuple[str, str], ...] = (
    (r"ada_?ln|ada_?norm|modulation|scale_shift", "modulation"),
    (r"(^|[._])mod(_[^.]*)?(\.|$)", "modulation"),  # img_mod.1, txt_mod.linear, time_mod_proj
    (r"norm[^.]*\.linear(_#+)?$", "modulation"),  # norm1.linear, norm1_context.linear
    (r"embed|(^|[._])emb([._]|$)", "embedding or embedder"),  # time_emb_proj, emb_layers.1
    (r"(^|\.)(wte|wpe)$", "embedding or embedder"),
    (r"relative_attention_bias|position_bias|rel_pos", "position table"),
    (r"(^|\.)(time|text|timestep|caption|guidance)_proj[^.]*(\.|$)", "embedding or embedder"),
    (r"(^|\.)(img|txt|text|time|vector|guidance)_in(\.|$)|guidance", "embedding or embedder"),
    (r"(^|\.)(context|caption|text|token)_refiner(\.|$)", "refiner of the text"),
    (r"(^|\.)norm_out(\.|$)", "final projection"),
    (r"(^|\.)(final_[^.]*|head|heads)(\.|$)", "final projection"),
    (r"(^|\.)proj_(in|out)$", "first or final projection"),
    (r"norm[^.]*$", "norm"),
    (r"(^|\.)ln(_[^.]*)?$", "norm"),
    (r"(^|\.)([^.]*_)?(gate|gating)(\.|$)|router", "router or gate"),
    (
        r"(^|\.)(visual(_tokenizer|_model|_encoder)?|vit|vpm|image_(encoder|model))(\.|$)",
        "vision tower",
    ),
    (r"vision|img_processor|sam_model|vqmodel", "vision tower"),
    (
        r"(^|\.)(multi_modal|mm|vision|visual|image|language|modality)_proj[^.]*(\.|$)",
        "multimodal projector",
    ),
    (r"merger|projector|resampler|perceiver|qformer|abstractor", "multimodal projector"),
    (r"(^|\.)([^.]*aligner|connector|mlp_ar)(\.|$)|^mlp#\.", "multimodal projector"),
    (r"(^|\.)(audio|speech|sound)_(tower|model|encoder|proj[^.]*)(\.|$)|whisper", "audio tower"),
    (r"^(apm|tts)\.|(^|\.)(token|code)#wav(\.|$)", "audio tower"),
    (r"(^|[._])(mtp|nextn)[^.]*(\.|$)", "MTP layer"),
    (r"(^|\.)(lm_head|score|cls|pooler|[^.]*classifier|qa_outputs)(\.|$)", "output head"),
    (r"(^|\.)lora", "LoRA weight"),
    (r"(^|\.)in_proj_(ba|a|b)$", "gates of linear attention"),
    (r"(^|\.)indexer\.weights_proj$", "kept by engines"),
)
"""(pattern, reason): a weight whose module name matches keeps its dtype under the generic rule.

Searched in the module name in lower case with every digit as "#". Published FP8 recipes keep these layers
because they are small and their errors are not averaged away, or because engines build them unquantized.
"""

STORED_TURNED = (
    r"^(GPT2|OpenAIGPT|ImageGPT|DecisionTransformer|Clvp)",
    r"(^|\.)([cq]_attn|c_proj|c_fc)$",
    "stored [in, out]",
)
"""Class names, module names and the reason: weights of transformers' Conv1D. Their readers turn them over, but not their
scales, and none of them takes such a layer for a linear that can be FP8."""

Numbers = tuple[str, ...]
"""The parts of a dotted name that are numbers, in order."""

_NUMBER = re.compile(r"(?<![^.])(\d+)(?![^.])")
_HOLE = "%s"
_EXPERT = re.compile(r"(.*?(?<![^.])experts)\.%s(?![^.])")
_BLURRED = str.maketrans(
    "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ", "#" * 10 + "abcdefghijklmnopqrstuvwxyz"
)
_WORDS = tuple((re.compile(pattern), reason) for pattern, reason in EXCLUDED_WORDS)


def split_numbers(name: str) -> tuple[str, Numbers]:
    """A dotted name as a template (a format with "%s" for each number) and its numbers."""
    parts = _NUMBER.split(name.replace("%", "%%"))
    return _HOLE.join(parts[::2]), tuple(parts[1::2])


class Pattern:
    """A name that follows from another name's numbers. Immutable."""

    __slots__ = ("_pick", "_text")

    def __init__(self, text: str, picks: Iterable[int]) -> None:
        """*text*: a format with "%s" for each number that is taken over; *picks*: which ones."""
        chosen = tuple(picks)
        self._text = text if chosen else text.replace("%%", "%")
        self._pick: Callable[[Numbers], object] | None = itemgetter(*chosen) if chosen else None

    def __repr__(self) -> str:
        return f"Pattern({self._text!r})"

    def fill(self, numbers: Numbers) -> str:
        """The name that goes with these numbers."""
        return self._text % self._pick(numbers) if self._pick is not None else self._text


class Ruling(NamedTuple):
    """What a rule says of all modules of one template.

    ``group``: the module into which it is fused with others, None if with none. ``together``: what its weight shares
    with others that must all be FP8 or none (a layer's experts, one spelling in an ignore list).
    """

    quantize: bool
    reason: str
    group: Pattern | None = None
    together: tuple[Pattern, ...] = ()


class Rule(Protocol):
    """Decides by names alone. What shapes, dtypes, the user and other members of a group say comes on top."""

    def judge(self, template: str, numbers: Numbers) -> Ruling:
        """The ruling for the module of that name, as ``split_numbers`` splits it. Fast for templates seen before."""
        ...


class GenericRule:
    """For classes that no engine's profile knows: linears in repeated blocks, unless a word excludes them."""

    def __init__(self, class_name: str = "", fusions: Iterable[Fusion] = FUSIONS) -> None:
        classes, modules, reason = STORED_TURNED
        turned = re.search(classes, class_name) is not None
        self._words = ((re.compile(modules), reason), *_WORDS) if turned else _WORDS
        self._label: Mapping[str, str] = leaf_table(fusions)
        self._known: dict[str, Ruling] = {}

    def judge(self, template: str, numbers: Numbers) -> Ruling:
        ruling = self._known.get(template)
        if ruling is None:
            verdict = self._verdict(template % numbers)
            ruling = Ruling(*verdict, self.group(template), _layer_of(template))
            self._known[template] = ruling
        return ruling

    def group(self, template: str) -> Pattern | None:
        """The fused module, by the leaf's name alone."""
        parent, _, leaf = template.rpartition(".")
        label = self._label.get(leaf)
        if label is None:
            return None
        holes = parent.replace("%%", "").count(_HOLE)
        return Pattern(f"{parent}.{label}" if parent else label, range(holes))

    def _verdict(self, module: str) -> tuple[bool, str]:
        module = module.translate(_BLURRED)
        for pattern, reason in self._words:
            if pattern.search(module):
                return False, reason
        # A number in last place is a position in a Sequential (time_projection.1), not a repeated block.
        if not any(part and not part.strip("#") for part in module.split(".")[:-1]):
            return False, "not inside a repeated block"
        return True, "linear weight in a repeated block"


def _layer_of(template: str) -> tuple[Pattern, ...]:
    """What binds an expert to the others of its layer: engines build them as one, all FP8 or none."""
    found = _EXPERT.match(template)
    if found is None:
        return ()
    layer = found[1]
    return (Pattern(layer, range(layer.replace("%%", "").count(_HOLE))),)


class ProfileRule:
    """What an engine does with a model class; modules that its profile does not know are kept.

    Groups of unknown modules follow the generic rule, for weights that the user forces.
    """

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._generic = GenericRule()
        self._fixed: dict[str, tuple[int, ...]] = {}
        self._known: dict[tuple[str, Numbers], Ruling] = {}

    def judge(self, template: str, numbers: Numbers) -> Ruling:
        fixed = self._fixed.get(template)
        if fixed is None:
            fixed = self._fixed[template] = self._profile.fixed_numbers(template % numbers)
        key = (template, tuple([numbers[i] for i in fixed]) if fixed else ())
        ruling = self._known.get(key)
        if ruling is None:
            ruling = self._known[key] = self._ask(template, numbers, fixed)
        return ruling

    def _ask(self, template: str, numbers: Numbers, fixed: tuple[int, ...]) -> Ruling:
        """Ask about a stand-in whose open numbers can be found again in the names that come back."""
        marks = [
            number if i in fixed else f"{_MARK}{i:03d}{_MARK}" for i, number in enumerate(numbers)
        ]
        module = template % tuple(marks)
        verdict = self._profile.decide(module)
        fusion = self._profile.fusion_of(module)
        if fusion is None:
            return Ruling(verdict.quantize, verdict.reason, self._generic.group(template))
        is_fused = len(fusion.siblings) > 1
        # A spelling that keeps others unquantized too, in an ignore list, binds them together.
        shared = set(self._profile.ignored([module])) - {module, *fusion.siblings}
        if fusion.together:
            shared.add(fusion.together)
        if is_fused:
            shared.discard(fusion.runtime)
        return Ruling(
            verdict.quantize,
            verdict.reason,
            _pattern(fusion.runtime) if is_fused else None,
            tuple(map(_pattern, sorted(shared))),
        )


_MARK = "987654321"
_MARKED = re.compile(rf"(?<![^.]){_MARK}(\d\d\d){_MARK}(?![^.])")


def _pattern(name: str) -> Pattern:
    """A name with marked numbers as a pattern."""
    parts = _MARKED.split(name.replace("%", "%%"))
    return Pattern(_HOLE.join(parts[::2]), map(int, parts[1::2]))
