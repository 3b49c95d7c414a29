# A thin front to scripts/, which can be run without it.
# `make serve PORT=31000 ARGS="--max-total-tokens 8192"` passes flags to the server.
FLAGS = $(if $(PORT),--port $(PORT)) $(ARGS)
.PHONY: setup serve serve-pd test nightly lint

setup:
	@scripts/setup.sh

serve:
	@scripts/serve.sh $(FLAGS)

serve-pd:
	@scripts/serve_pd.sh $(FLAGS)

test:
	@scripts/test.sh

nightly:
	@scripts/nightly.sh

lint:
	@scripts/lint.sh
