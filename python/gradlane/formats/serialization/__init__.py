"""State as JSON and raw bytes: nothing that is read can run code.

`strict_json` parses text, `structure` turns values into JSON and back, `container` is the file
format, `pieces` puts tensors together and packs a whole value into bytes.
"""
