from kvpolicy.errors import InputError as InputError
from kvpolicy.inference.generation import Generation as Generation
from kvpolicy.inference.generation import compressed_generate as compressed_generate
from kvpolicy.inference.loading import load_model as load_model
from kvpolicy.policies.policy_set import load_policy as load_policy
