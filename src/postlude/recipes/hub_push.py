"""`push_to_hub`: the exported model as a repository of the Hugging Face Hub.

The token is what huggingface_hub finds: HF_TOKEN, or that of `hf auth login`.
"""

from __future__ import annotations

import logging
import shlex
from pathlib import Path

from postlude.data.hub import failure_reason
from postlude.recipes.report.live import RunConsole

LOG = logging.getLogger("postlude")


def push_model(folder: Path, repository: str, step: int) -> None:
    """Uploads a model, to a new private repository if there is none. A failure is logged, with how to repeat it."""
    from huggingface_hub import HfApi

    try:
        api = HfApi()
        api.create_repo(repository, private=True, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=folder, commit_message=f"Model after step {step}")
    except Exception as error:  # whatever the library and its HTTP client raise
        LOG.warning(
            "%s was not pushed to %s: %s. Repeat it with: hf upload %s %s",
            folder,
            repository,
            _reason(error),
            repository,
            shlex.quote(str(folder)),
        )
    else:
        RunConsole().print(f"pushed: https://huggingface.co/{repository}", markup=False, highlight=False)


def check_push(repository: str) -> str:
    """Refuses a repository that the user cannot write. Returns a line about it. Without a connection all is allowed."""
    from huggingface_hub import HfApi, constants, errors

    if constants.HF_HUB_OFFLINE:
        raise ValueError(f"push_to_hub is {repository}, but HF_HUB_OFFLINE is set. Unset it, or leave push_to_hub out.")
    login = "Log in with `hf auth login`, or set HF_TOKEN, with a token that can write"
    try:
        user = HfApi().whoami()
    except errors.LocalTokenNotFoundError as error:
        raise ValueError(f"push_to_hub is {repository}, but there is no token of the Hub. {login}.") from error
    except errors.HfHubHTTPError as error:
        if error.response is not None and error.response.status_code in (401, 403):
            raise ValueError(f"push_to_hub is {repository}, but the Hub refuses the token. {login}.") from error
        return f"{repository}, not checked: {_reason(error)}"
    except Exception as error:
        return f"{repository}, not checked: {_reason(error)}"
    owner = repository.partition("/")[0]
    roles = {user["name"]: "admin"} | {each["name"]: each.get("roleInOrg", "") for each in user.get("orgs", [])}
    if owner not in roles:
        raise ValueError(
            f"push_to_hub is {repository}, but {user['name']} is not a member of {owner}. Push to one of: "
            f"{', '.join(roles)}."
        )
    token_role = user.get("auth", {}).get("accessToken", {}).get("role")
    if "read" in (token_role, roles[owner]):
        raise ValueError(f"push_to_hub is {repository}, but {user['name']} may only read {owner}. {login}.")
    return f"{repository}, as {user['name']}"


def _reason(error: BaseException) -> str:
    from huggingface_hub import get_token

    reason, token = failure_reason(error), get_token()
    return reason.replace(token, "***") if token else reason
