"""How a chat template reads messages: content as text, in parts or as either comes, arguments of
tool calls as objects or as texts."""

from jinja2 import nodes

_OF_LISTS = ("selectattr", "rejectattr", "map")  # filters that have no use for a string


def reads_parts(tree: nodes.Template) -> bool:
    """Whether the template loops over some message's content, or filters what is in it, by itself
    or under a new name."""
    names = {
        assign.target.name
        for assign in tree.find_all(nodes.Assign)
        if isinstance(assign.target, nodes.Name) and _is_content(assign.node)
    }
    names |= _given_to_macros(tree)
    listed = [loop.iter for loop in tree.find_all(nodes.For)]
    filters = (one for one in tree.find_all(nodes.Filter) if one.name in _OF_LISTS)
    listed += [one.node for one in filters if one.node is not None]
    return any(
        _is_content(node) or (isinstance(node, nodes.Name) and node.name in names)
        for node in listed
    )


def _given_to_macros(tree: nodes.Template) -> set[str]:
    """What content is called in macros that some message's is given to."""
    macros = {macro.name: macro.args for macro in tree.find_all(nodes.Macro)}
    return {
        name.name
        for call in tree.find_all(nodes.Call)
        if isinstance(call.node, nodes.Name)
        for name, given in zip(macros.get(call.node.name, ()), call.args, strict=False)
        if _is_content(given)
    }


def asks_for_text(tree: nodes.Template) -> bool:
    """Whether some content is a string; a name may be that of a macro's argument. To a template
    that does not ask, a string has no parts: it would leave the message empty."""
    tests = [test.node for test in tree.find_all(nodes.Test) if test.name == "string"]
    return any(_is_content(node) or isinstance(node, nodes.Name) for node in tests)


def adds_arguments(tree: nodes.Template) -> bool:
    """Whether those of tool calls are put between other texts as they are, which takes a text;
    where they may be either, the template asks."""
    added = [operand for add in tree.find_all(nodes.Add) for operand in (add.left, add.right)]
    asked = [test.node for test in tree.find_all(nodes.Test) if test.name in ("string", "mapping")]
    return any(_is("arguments", node) for node in added) and not any(
        _is("arguments", node) for node in asked
    )


def refuses_thinking_beside_content(tree: nodes.Template) -> bool:
    """Of who calls tools: gpt-oss's template has one place for both."""
    both = [
        test.body
        for test in tree.find_all(nodes.If)
        if isinstance(test.test, nodes.And)
        and _is_content(test.test.left)
        and _is("thinking", test.test.right)
    ]
    calls = [call.node for body in both for node in body for call in node.find_all(nodes.Call)]
    return any(isinstance(node, nodes.Name) and node.name == "raise_exception" for node in calls)


def adds_descriptions(tree: nodes.Template) -> bool:
    """Whether those of tools are put behind other texts, be there any or not."""
    added = [operand for add in tree.find_all(nodes.Add) for operand in (add.left, add.right)]
    asked = [test.node for test in tree.find_all(nodes.Test) if test.name == "defined"]
    return any(_is("description", node) for node in added) and not any(
        _is("description", node) for node in asked
    )


def asks_for_none(tree: nodes.Template) -> bool:
    """Whether some content is null, as it is beside tool calls."""
    return any(_is_content(test.node) for test in tree.find_all(nodes.Test) if test.name == "none")


def _is_content(node: nodes.Node) -> bool:
    return _is("content", node)


def _is(name: str, node: nodes.Node) -> bool:
    """What something has under this name."""
    if isinstance(node, nodes.Getattr):
        return node.attr == name
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == name
    return False
