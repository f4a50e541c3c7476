"""Which role each request needs. An endpoint that is not in this table cannot be served: see `application`."""

from collections.abc import Mapping
from dataclasses import dataclass

from millrace.errors import MillraceError
from millrace.rest.users import Role

ROLES: Mapping[tuple[str, str], Role] = {
    ("POST", "/v1/jobs"): Role.SUBMIT,
    ("GET", "/v1/jobs"): Role.READ,
    ("GET", "/v1/jobs/{job_id}"): Role.READ,
    ("PATCH", "/v1/jobs/{job_id}"): Role.SUBMIT,
    ("DELETE", "/v1/jobs/{job_id}"): Role.SUBMIT,
    ("POST", "/v1/jobs/{job_id}/delete"): Role.SUBMIT,
    ("POST", "/v1/jobs/{job_id}/pause"): Role.SUBMIT,
    ("POST", "/v1/jobs/{job_id}/resume"): Role.SUBMIT,
    ("GET", "/v1/jobs/{job_id}/metrics"): Role.READ,
    ("GET", "/v1/jobs/{job_id}/metrics/keys"): Role.READ,
    ("GET", "/v1/jobs/{job_id}/series"): Role.READ,
    ("GET", "/v1/jobs/{job_id}/histograms"): Role.READ,
    ("GET", "/v1/jobs/{job_id}/samples"): Role.READ,
    ("GET", "/v1/jobs/{job_id}/groups"): Role.READ,
    ("GET", "/v1/jobs/{job_id}/tokens/{record}"): Role.READ,
    ("GET", "/v1/jobs/{job_id}/prompts/{prompt_id}/images/{number}"): Role.READ,
    ("GET", "/v1/jobs/{job_id}/spec"): Role.READ,
    ("GET", "/v1/jobs/{job_id}/ledger"): Role.READ,
    ("GET", "/v1/jobs/{job_id}/events"): Role.READ,
    ("GET", "/v1/jobs/{job_id}/publications"): Role.READ,
    ("GET", "/v1/jobs/{job_id}/timeline"): Role.READ,
    ("GET", "/v1/jobs/{job_id}/diagnosis"): Role.READ,
    ("GET", "/v1/fleet"): Role.READ,
    ("POST", "/v1/fleet/{member_id}/drain"): Role.ADMIN,
    ("GET", "/v1/fleet/{member_id}/log"): Role.ADMIN,  # it names the jobs of all
    ("GET", "/v1/spec/schema"): Role.READ,
    ("POST", "/v1/spec/validate"): Role.SUBMIT,  # it looks at files
    ("POST", "/v1/webhooks/test"): Role.ADMIN,
    ("POST", "/v1/jobs/{job_id}/webhooks/test"): Role.SUBMIT,
    ("GET", "/v1/users"): Role.ADMIN,
    ("POST", "/v1/users"): Role.ADMIN,
    ("DELETE", "/v1/users/{name}"): Role.ADMIN,
    ("POST", "/v1/users/{name}/tokens"): Role.ADMIN,
    ("GET", "/v1/audit"): Role.ADMIN,
}


@dataclass(frozen=True)
class Caller:
    """Who makes a request."""

    user: str
    """Empty if the coordinator has no token and takes everybody for an admin."""
    role: Role
    token: str = ""
    """Id of the user's token."""

    def sees(self, owner: str) -> bool:
        """Whether the caller may know of a job of `owner`."""
        return self.role is Role.ADMIN or owner == self.user


def check_table(served: set[tuple[str, str]]) -> None:
    """Raises MillraceError if an endpoint has no role, or a role has no endpoint. `served`: methods and paths."""
    if wrong := sorted(served ^ ROLES.keys()):
        listed = ", ".join(f"{method} {path}" for method, path in wrong)
        raise MillraceError(f"endpoints without a role, or roles without an endpoint: {listed}.", "correct ROLES.")
