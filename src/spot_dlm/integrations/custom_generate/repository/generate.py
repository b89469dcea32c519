"""What transformers loads for `model.generate(..., custom_generate=THIS_REPOSITORY, trust_remote_code=True)`: spot-dlm's decoder."""

from spot_dlm.integrations.generation import generate

__all__ = ["generate"]
