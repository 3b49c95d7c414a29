# A thin front to scripts/, which can be run without it.
.PHONY: setup serve serve-pd test nightly lint

setup:
	@scripts/setup.sh

serve:
	@scripts/serve.sh

serve-pd:
	@scripts/serve_pd.sh

test:
	@scripts/test.sh

nightly:
	@scripts/nightly.sh

lint:
	@scripts/lint.sh
