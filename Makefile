# Every target sets up what it needs: a .venv with the locked versions.
PYTHON ?= python3
BIN := .venv/bin
# One thread for each process: more of them spin against each other on busy cores.
export OMP_NUM_THREADS = 1
export MKL_NUM_THREADS = 1
export NO_MKDOCS_2_WARNING = 1

.PHONY: demo cluster-demo test test-cluster lint docs docs-serve bench reproduce clean

.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Fewer needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c constraints.txt -e '.[dev,docs,flower,dash,notebook,track]'
	touch $@

demo: .venv/.installed      ## compare six methods on real images
	$(BIN)/fewer compare local fedavg fedprox fedbn fedgen fedmk --data fashion-mini --clients 20 --alpha 0.5 --rounds 5 --seeds 3 --runtime pool \
		-o per_class=15 -o matching=100 -o outer_steps=5 -o server_steps=500

cluster-demo: .venv/.installed ## three clients with keys and TLS, each in processes of its own, on this machine
	$(BIN)/fewer local-cluster 3 fedmk --data fashion-mini --rounds 2 \
		-o per_class=10 -o matching=30 -o outer_steps=5 -o server_steps=200
	$(BIN)/fewer local-cluster 3 metafed --data fashion-mini --validation 0.2 --rounds 2 -o steps=50

test: .venv/.installed      ## run the tests
	$(BIN)/pytest -n 2

test-cluster: .venv/.installed ## all tests of runs between machines, with every fault and every method
	$(BIN)/pytest -n 0 -m 'cluster or not cluster' tests/machines

lint: .venv/.installed      ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: .venv/.installed      ## the docs as a site: build/site/index.html
	$(BIN)/mkdocs build --strict

docs-serve: .venv/.installed ## the same on http://127.0.0.1:8000, made again when a page changes
	$(BIN)/mkdocs serve

bench: .venv/.installed     ## speed, memory and scaling, as ratios within one run
	$(BIN)/python -m benchmarks

reproduce: .venv/.installed ## the tables of docs/results (hours; needs FEWER_DATA)
	$(BIN)/fewer reproduce baselines/mnist
	$(BIN)/fewer reproduce fedmk/table1

clean:
	rm -rf .venv build dist
