#!/usr/bin/env bash
# Makes the environment of each peer, from its pinned requirements: environments.sh DIRECTORY
set -euo pipefail
into="${1:?expected the directory that the environments go to}"
here="$(cd "$(dirname "$0")" && pwd)"
python="${PYTHON:-python3.11}"
for peer in d3p jax_privacy opacus; do
  "$python" -m venv "$into/$peer"
  "$into/$peer/bin/pip" install -q --disable-pip-version-check -r "$here/$peer.txt"
done
