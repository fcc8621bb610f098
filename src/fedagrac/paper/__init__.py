"""The paper's tables and figures: settings as data, the paper's figures beside ours."""
