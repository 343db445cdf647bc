"""A run's model as a folder, as ONNX, and on the Hugging Face Hub; the model card."""
