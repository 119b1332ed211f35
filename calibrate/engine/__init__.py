"""A small decoder engine in torch: the models that speculative decoding is measured with.

In reading order: `config` what a model is, `cache` its keys and values, `decoder` a pass,
`graphs` passes replayed on a GPU, `checkpoints` and `gguf_files` weights from local files,
`tokenizers` text and vocabularies, `generate` plain decoding, the reference that every speculative
loop must reproduce.
"""
