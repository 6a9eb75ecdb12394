# Every target first builds what it needs: a .venv with locked versions.
PYTHON ?= python3
BIN := .venv/bin
# One thread per process: more threads would compete for busy cores.
export OMP_NUM_THREADS = 1
export MKL_NUM_THREADS = 1
export NO_MKDOCS_2_WARNING = 1

.DEFAULT_GOAL := help
.PHONY: help demo cluster-demo test test-cluster test-faults coverage lint format docs docs-serve wheel wheel-newest bench reproduce check-results clean

help:                          ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Fewer needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c constraints.txt -e '.[dev,docs,dp,flower,dash,notebook,track]'
	touch $@

demo: .venv/.installed         ## compare six methods on real images
	$(BIN)/fewer compare local fedavg fedprox fedbn fedgen fedmk --data fashion-mini --clients 20 --alpha 0.5 --rounds 5 --seeds 3 --runtime pool \
		-o per_class=15 -o matching_steps=100 -o outer_steps=5 -o server_steps=500

cluster-demo: .venv/.installed ## three clients with keys and TLS, in separate processes on this machine
	$(BIN)/fewer local-cluster 3 fedmk --data fashion-mini --rounds 2 \
		-o per_class=10 -o matching_steps=30 -o outer_steps=5 -o server_steps=200
	$(BIN)/fewer local-cluster 3 metafed --data fashion-mini --validation 0.2 --rounds 2 -o local_steps=50

test: .venv/.installed         ## run the tests
	$(BIN)/pytest -n 2

test-cluster: .venv/.installed ## all tests between machines, with every fault and every method
	$(BIN)/pytest -n 0 -m 'cluster or not cluster' tests/machines tests/runtime/flower

test-faults: .venv/.installed  ## fill the disk at every write of every method, or kill the run (hours)
	$(BIN)/pytest -n 2 -m faults --timeout 3600

coverage: .venv/.installed     ## run the tests and report the covered lines of src/fewer; less than 95 % is an error
	$(BIN)/pytest -n 2 --cov --cov-report=term --cov-fail-under=95

lint: .venv/.installed         ## check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/.installed       ## format the code; write the type stub and the pages of results
	$(BIN)/python tools/make_stub.py
	$(BIN)/python tools/render_results.py
	$(BIN)/python tools/make_results_index.py
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: .venv/.installed         ## build the docs as a site: build/site/index.html
	$(BIN)/mkdocs build --strict

docs-serve: .venv/.installed   ## serve the docs on http://127.0.0.1:8000 and rebuild on changes
	$(BIN)/mkdocs serve

wheel: .venv/.installed        ## build a wheel, install it into a new environment and run it outside the checkout
	$(BIN)/python tools/check_wheel.py

wheel-newest: .venv/.installed ## the same with the newest dependencies that the wheel allows (downloads them)
	$(BIN)/python tools/check_wheel.py --newest

bench: .venv/.installed        ## measure speed, memory and scaling, as ratios within one run
	$(BIN)/python -m benchmarks

reproduce: .venv/.installed    ## the tables of docs/results (hours; needs FEWER_DATA)
	$(BIN)/fewer reproduce baselines/mnist
	$(BIN)/fewer reproduce fedmk/table1

check-results: .venv/.installed ## re-run the cheapest cell of each result (hours; needs FEWER_DATA)
	$(BIN)/python -m tools.check_results

clean:                         ## remove the environment and all build products
	rm -rf .venv build dist
