# The developer's interface; each target is a script, for a look at what it does.
.PHONY: help install demo test check protos clean

help:
	@echo "make install   .venv with everything: kvlease, vLLM for CPUs, NIXL, development tools"
	@echo "make demo      a conversation of five turns on real engines, with and without reuse"
	@echo "make test      all tests; ARGS='-k lease' for some"
	@echo "make check     stubs match protos/, ruff, mypy"
	@echo "make protos    generate the stubs from protos/"
	@echo "make clean     remove .venv, build/ and caches"

install:
	@scripts/install

demo: install
	@scripts/ensure-etcd
	@.venv/bin/kvlease demo --dir build/demo

test:
	@scripts/test $(ARGS)

check:
	@scripts/check

protos:
	@scripts/protos

clean:
	@scripts/clean
