"""Folders as Hugging Face's transformers writes them: config.json and safetensors, read into our models and written."""
