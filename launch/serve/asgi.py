"""Types of the arguments of an ASGI application (asgi.readthedocs.io, version 3)."""

from collections.abc import Awaitable, Callable

from cloze.pipeline.fields import Fields

Scope = Fields
Message = Fields
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
