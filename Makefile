# A thin front to scripts/, which can be run without it.
.PHONY: setup serve test lint

setup:
	@scripts/setup.sh

serve:
	@scripts/serve.sh

test:
	@scripts/test.sh

lint:
	@scripts/lint.sh
