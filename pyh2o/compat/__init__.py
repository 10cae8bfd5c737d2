"""llama_cpp's class and OpenAI's completions, over a model and its texts."""
