"""What Kubernetes and SkyPilot take, as JSON schemas, for the part that launch/ uses: they drop or
refuse other keys.

After kubeflow/training-operator's CRD (manifests/base/crds/kubeflow.org_pytorchjobs.yaml at
c20bf65e, which has the pod's template of Kubernetes v1 in it) and sky/utils/schemas.py of
skypilot-org/skypilot at 00052dfe.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def _object(properties: Schema, required: tuple[str, ...] = ()) -> Schema:
    """Kubernetes drops what it does not know, or refuses it."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items, "minItems": 1}


_TEXT: Schema = {"type": "string"}
_WHOLE: Schema = {"type": "integer"}
_NAME: Schema = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"}
_QUANTITY: Schema = {
    "anyOf": [
        _WHOLE,
        {
            "type": "string",
            "pattern": r"^[+-]?(\d+(\.\d*)?|\.\d+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?\d+)?$",
        },
    ]
}
_QUANTITIES: Schema = {"type": "object", "additionalProperties": _QUANTITY}
_TEXTS: Schema = {"type": "object", "additionalProperties": _TEXT}

_CONTAINER = _object(
    {
        "name": _NAME,
        "image": _TEXT,
        "command": _list(_TEXT),
        "args": _list(_TEXT),
        "env": _list(
            _object(
                {
                    "name": {"type": "string", "pattern": "^[-._a-zA-Z][-._a-zA-Z0-9]*$"},
                    "value": _TEXT,
                }
            )
        ),
        "ports": _list(
            _object(
                {"name": _NAME, "containerPort": {"type": "integer", "maximum": 65535}},
                ("containerPort",),
            )
        ),
        "resources": _object({"limits": _QUANTITIES, "requests": _QUANTITIES}),
        "volumeMounts": _list(_object({"name": _NAME, "mountPath": _TEXT}, ("name", "mountPath"))),
    },
    ("name",),
)
_VOLUME = _object(
    {
        "name": _NAME,
        "persistentVolumeClaim": _object(
            {"claimName": _TEXT, "readOnly": {"type": "boolean"}}, ("claimName",)
        ),
        "emptyDir": _object({"medium": {"enum": ["", "Memory"]}, "sizeLimit": _QUANTITY}),
    },
    ("name",),
)
_POD = _object(
    {
        "terminationGracePeriodSeconds": _WHOLE,
        "securityContext": _object({"runAsUser": _WHOLE, "runAsGroup": _WHOLE, "fsGroup": _WHOLE}),
        "containers": _list(_CONTAINER),
        "volumes": _list(_VOLUME),
    },
    ("containers",),
)
_REPLICA = _object(
    {
        "replicas": _WHOLE,
        "restartPolicy": {"enum": ["Always", "OnFailure", "Never", "ExitCode"]},
        "template": _object(
            {"metadata": _object({"annotations": _TEXTS, "labels": _TEXTS}), "spec": _POD}
        ),
    }
)
PYTORCH_JOB = _object(
    {
        "apiVersion": {"const": "kubeflow.org/v1"},
        "kind": {"const": "PyTorchJob"},
        "metadata": _object({"name": _NAME, "namespace": _NAME, "labels": _TEXTS}, ("name",)),
        "spec": _object(
            {
                "nprocPerNode": _TEXT,
                "runPolicy": _object(
                    {
                        "activeDeadlineSeconds": _WHOLE,
                        "backoffLimit": _WHOLE,
                        "cleanPodPolicy": {"enum": ["All", "Running", "None"]},
                        "ttlSecondsAfterFinished": _WHOLE,
                    }
                ),
                "pytorchReplicaSpecs": _object(
                    {"Master": _REPLICA, "Worker": _REPLICA}, ("Master",)
                ),
            },
            ("pytorchReplicaSpecs",),
        ),
    },
    ("apiVersion", "kind", "metadata", "spec"),
)

_EXIT_CODE: Schema = {"type": "integer", "minimum": 0, "maximum": 255}
SKYPILOT_TASK = _object(
    {
        "name": _TEXT,
        "num_nodes": _WHOLE,
        "workdir": _TEXT,
        "resources": _object(
            {
                "infra": _TEXT,
                "accelerators": {"type": "string", "pattern": r"^[\w-]+:\d+$"},
                "use_spot": {"type": "boolean"},
                "disk_size": _WHOLE,
                "image_id": _TEXT,
                "job_recovery": _object(
                    {
                        "strategy": _TEXT,
                        "max_restarts_on_errors": {"type": "integer", "minimum": 0},
                        "recover_on_exit_codes": {
                            "type": "array",
                            "items": _EXIT_CODE,
                            "uniqueItems": True,
                        },
                    }
                ),
            }
        ),
        "volumes": _TEXTS,
        "envs": {
            "type": "object",
            "patternProperties": {"^[a-zA-Z_][a-zA-Z0-9_]*$": {"type": ["string", "null"]}},
            "additionalProperties": False,
        },
        "setup": _TEXT,
        "run": _TEXT,
    }
)
