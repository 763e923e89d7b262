"""The engine's values as messages of the wire, and back.

Decoding takes nothing on trust: what is wrong is a RequestError that names the field. Messages
only: no connection is known here.
"""
