"""The accuracy study: what codecs and asynchrony do to learning, in one process.

Workers are emulated: their gradients are computed one after another from one set of parameters and
go through the codec kernels and the data flow of the `ps` scheme. Time is emulated, too: the bound
on a step for the model's sizes and the bytes that were encoded.
"""
