"""specmodel: does speculative decoding pay on this device, and with how many drafts?"""
from specmodel.architectures import *  # temporary
