"""GGUF files, llama.cpp's: read as folders in the Hub's layout, and written.

- `container`: metadata, and tensors that are decoded as they are read;
- `architectures`: what of a file is config.json and the Hub's tensors, by architecture, and back;
- `tokens`: what is tokenizer.json and tokenizer_config.json, and back;
- `folder`: a file as a folder; `write`: a checkpoint as a file.
"""
