"""State as JSON and raw bytes; reading it cannot run code.

`strict_json` parses text, `structure` converts values to JSON and back, `container` is the file
format, and `pieces` assembles tensors and packs a whole value into bytes.
"""
