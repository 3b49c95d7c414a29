# A thin front to scripts/, which can be run without it.
.PHONY: setup serve test nightly lint

setup:
	@scripts/setup.sh

serve:
	@scripts/serve.sh

test:
	@scripts/test.sh

nightly:
	@scripts/nightly.sh

lint:
	@scripts/lint.sh
