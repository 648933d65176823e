"""Brings published weights into the engines, and tells the gateways before and after."""
