"""What both sides of a publication share: plans (who sends what to whom), transfer (moving the bytes), loader (learning
where an engine's loader puts tensors), and the phases."""
