"""The one reader of YAML: safe, with text keys that occur once."""

from __future__ import annotations

from typing import Any

import yaml

from specmodel.errors import brief


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """A safe loader that also refuses duplicate keys."""


def _no_duplicates(loader: Any, node: yaml.MappingNode) -> dict[Any, Any]:
    mapping: dict[Any, Any] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str):
            raise yaml.constructor.ConstructorError(
                None, None, f"keys must be text; got {brief(key)}", key_node.start_mark
            )
        if key in mapping:
            raise yaml.constructor.ConstructorError(
                None, None, f"duplicate key {brief(key)}", key_node.start_mark
            )
        mapping[key] = loader.construct_object(value_node, deep=True)
    return mapping


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _no_duplicates)


def parse_yaml(text: str) -> Any:
    """Return what a YAML text holds.

    Raises
    ------
    ValueError
        When it is not valid, has a tag or an alias, or a key that is no text or occurs twice.
    """
    try:
        if "*" in text or "!" in text:
            for event in yaml.parse(text, Loader=_Loader):
                if (tag := getattr(event, "tag", None)) is not None:
                    raise ValueError(f"tag {brief(tag)}: tags are not read")
                # an alias repeats a part, and a few lines of them fill any memory
                if isinstance(event, yaml.AliasEvent):
                    raise ValueError(
                        f"alias {brief(f'*{event.anchor}')}: write out what it repeats"
                    )
        return yaml.load(text, Loader=_Loader)  # noqa: S506 (a safe loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"not valid YAML: {' '.join(str(error).split())}") from None


def yaml_text(values: Any, *, leaves_on_one_line: bool = False) -> str:
    """Return values as YAML, keys in their order."""
    flow = None if leaves_on_one_line else False
    return yaml.safe_dump(
        values, sort_keys=False, allow_unicode=True, width=100, default_flow_style=flow
    )
