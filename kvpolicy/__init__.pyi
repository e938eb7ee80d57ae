from kvpolicy.errors import InputError as InputError
from kvpolicy.generation import Generation as Generation
from kvpolicy.generation import compressed_generate as compressed_generate
from kvpolicy.loading import load_model as load_model
from kvpolicy.policies.policy_set import load_policy as load_policy
